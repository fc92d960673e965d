"""One engine for many concurrent callers: a queue, batches across callers, and workers."""
