"""Many concurrent callers, one engine: queue, batches across callers, workers."""
