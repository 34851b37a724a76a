"""A whole forward pass as one compiled call: a list of operations that all threads walk together.

Python builds the list once per model and says per step only how many rows there are and where they
lie. EMBED begins; then, per layer:

    NORM      residual += norm(delta); norm; quantise         a row is an item
    MATMUL    quantised rows times packed weights             32 outputs are an item
    ROPE      (q/k norm,) rotate, write keys and values       a row is an item
    ATTEND    paged attention over the block table; quantise  (query tile, kv head) is an item
    MERGE     joins what ATTEND did in pieces; quantise       the same
    GATE      silu(gate) · up, or GELU; quantise              a row is an item

Which norms there are, and what else varies between families, is said by an operation's fields. At
the end CAP scales and caps the logits of families that do, and BEST finds each row's largest. THIN,
a program of its own, finds for rows that are drawn at random the few tokens that can win.

An item belongs to one thread and is computed the same way whoever else is in the batch, so a row's
bits never depend on it. Threads take items from counters and meet after each operation.

The keys of a block lie transposed, [head_dim, 32], so that 32 scores are computed at once; values
lie as they are. Both are bfloat16; arithmetic is float32. The keys of a sequence are summed up in
pieces of 512, each from scratch, and the pieces are joined in order. That depends on positions
alone, so it is free whether one thread does the pieces of a long sequence or many do (as in
Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from . import cpu_ir as vec
from .cpu_attend import attend, merge
from .cpu_compile import Table, inlined, kernel
from .cpu_fetch import begin_fetching
from .cpu_products import MATMUL_STRIPS, matmul4, matmul8, matmul16
from .cpu_rows import best, cap, embed, gate, norm, quantize, rope, thin
from .cpu_step import (
    ARRIVALS,
    ATTEND,
    BEST,
    CAP,
    COUNTER_STRIDE,
    COUNTERS,
    CYCLES,
    EMBED,
    GATE,
    MATMUL,
    MERGE,
    NORM,
    NUM_LOGIT_ROWS,
    NUM_OPS,
    NUM_PIECES,
    NUM_ROWS,
    NUM_THREADS,
    NUM_TILES,
    OP_FIELDS,
    OPS,
    PACK,
    ROPE,
    SCRATCH,
    SCRATCH_STRIDE,
    THIN,
    THREADS_SEEN,
)
from .cpu_stored import pack

SPINS_BEFORE_YIELD = 4000

# ------------------------------------------------------------------------------------ the program


@inlined
def num_items(op: Table, head: Table) -> int:
    kind = op[0]
    if kind == MATMUL:
        return (op[5] // 8 + MATMUL_STRIPS - 1) // MATMUL_STRIPS
    if kind == ATTEND:
        return head[NUM_TILES] * op[9] * max(1, head[NUM_PIECES])
    if kind == MERGE:
        return head[NUM_TILES] * op[9] if head[NUM_PIECES] else 0
    if kind == CAP:
        return head[NUM_LOGIT_ROWS]
    if kind == BEST or (kind == NORM and op[8]):
        return head[NUM_LOGIT_ROWS]
    return head[NUM_ROWS]


@inlined
def run_item(item: int, op: Table, head: Table, scratch: int) -> None:
    kind = op[0]
    if kind == NORM:
        norm(item, op, head)
    elif kind == MATMUL:
        num_rows = head[NUM_LOGIT_ROWS] if op[10] else head[NUM_ROWS]
        if op[8] == 4:
            matmul4(item, op, num_rows, head, scratch)
        elif op[8] == 16:
            matmul16(item, op, num_rows)
        else:
            matmul8(item, op, num_rows)
    elif kind == ROPE:
        rope(item, op, head)
    elif kind == ATTEND:
        attend(item, op, head, scratch)
    elif kind == MERGE:
        merge(item, op, head)
    elif kind == GATE:
        gate(item, op)
    elif kind == BEST:
        best(item, op)
    elif kind == THIN:
        thin(item, op)
    elif kind == EMBED:
        embed(item, op)
    elif kind == CAP:
        cap(item, op)
    elif kind == PACK:
        pack(item, op)
    else:
        quantize(item, op)


@inlined
def wait_for(head: Table, arrivals: int) -> None:
    """Until so many have arrived, this thread among them."""
    vec.fetch_add(head[ARRIVALS], 1)
    spins = 0
    while vec.load_atomic(head[ARRIVALS]) < arrivals:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            vec.pause()
        else:
            vec.yield_thread()


@inlined
def run_op(index: int, op: Table, head: Table, items: int, me: int, scratch: int) -> None:
    """This thread's part of an operation.

    Weights lie in the order of the items, and come from memory half as fast again if a thread reads
    on where it is. And a row that a thread wrote is in its cache: so items are cut into a share for
    each thread, who then helps the others.
    """
    shares = head[NUM_THREADS] if head[COUNTER_STRIDE] else 1
    for turn in range(shares):
        share = (me + turn) % shares
        first, end = share * items // shares, (share + 1) * items // shares
        counter = head[COUNTERS] + share * head[COUNTER_STRIDE] + index * 8
        item = first + vec.fetch_add(counter, 1)
        while item < end:
            run_item(item, op, head, scratch)
            item = first + vec.fetch_add(counter, 1)


@kernel
def run(head: Table) -> None:
    """Walk the step that the header at this address describes. Called once per thread."""
    threads = head[NUM_THREADS]
    me = vec.fetch_add(head[THREADS_SEEN], 1)
    scratch = head[SCRATCH] + me * head[SCRATCH_STRIDE]
    if scratch:
        begin_fetching(head, scratch, me)
    meetings = 0
    for index in range(head[NUM_OPS]):
        op = Table(head[OPS] + index * (OP_FIELDS * 8))
        items = num_items(op, head)
        if items == 0:
            continue
        run_op(index, op, head, items, me, scratch)
        if threads > 1:
            meetings += 1
            wait_for(head, meetings * threads)
        if head[CYCLES] and me == 0:
            vec.store_int(head[CYCLES] + index * 8, vec.cycles())
