"""The headers of model files, checked against the file's size; standard library only.

Model files are hostile until proven otherwise: every length, count and offset is compared with the
size of the file before anything is allocated or read (CVE-2024-12055, CVE-2026-7482 and others).
"""
