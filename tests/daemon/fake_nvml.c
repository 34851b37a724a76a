/* Enough of the NVIDIA driver's management library for an inventory of made-up cards.
   The file that FAKE_NVML_CARDS names holds their number; each has 8 GB, 6 of them free. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static long cards(void) {
    FILE *file = fopen(getenv("FAKE_NVML_CARDS"), "r");
    long count = 0;
    if (file) { if (fscanf(file, "%ld", &count) != 1) count = 0; fclose(file); }
    return count;
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)cards(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *m) { (void)handle; m->total = 8000000000ull; m->free = 6000000000ull; m->used = 2000000000ull; return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { snprintf(name, size, "Made-up card %zu", (size_t)handle); return 0; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-%zu", (size_t)handle); return 0; }
