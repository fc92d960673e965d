"""The Triton kernels of mean pooling. reference.py computes the same in plain torch.

There are three: one pools padded batches, one pools spans of a packed sequence, and one adds up
rows that were split. launch.py launches them.

- Every kept token is read once. Masked tokens are not loaded (rather than multiplied by zero), so
  NaN in padding can't leak and padding costs no memory traffic.
- Sums are FP32. Tokens are added within chunks counted from the row's first token, then chunk by
  chunk, no matter which program adds them: a row's sum does not depend on the batch around it, on
  padding after it, or on whether it was split.
- All offsets are 64-bit: batch * length * hidden may exceed 2^31.
"""

# Triton compiles these functions from source: their parameters are not Python values and have no
# Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mean_pool_combine_kernel", "mean_pool_kernel", "mean_pool_spans_kernel"]


@triton.jit
def _keep(mask_chunk, tokens, size, stride_mask, HAS_MASK: tl.constexpr):
    """Say which `tokens` of a chunk of `size` tokens the mask keeps."""
    keep = tokens < size
    if HAS_MASK:
        keep = tl.load(mask_chunk + tokens.to(tl.int64) * stride_mask, mask=keep, other=0) != 0
    return keep


@triton.jit
def _tile(hidden_chunk, mask_chunk, tokens, size, inside, stride_token, stride_mask, HAS_MASK: tl.constexpr):
    """Load the hidden states of `tokens`, 0 where masked. [BLOCK_TOKENS, BLOCK_HIDDEN]."""
    keep = _keep(mask_chunk, tokens, size, stride_mask, HAS_MASK)
    pointers = hidden_chunk + tokens.to(tl.int64)[:, None] * stride_token
    return tl.load(pointers, mask=keep[:, None] & inside[None, :], other=0)


@triton.jit
def _sum_tokens(
    hidden_row,
    mask_row,
    first,
    last,
    columns,
    stride_token,
    stride_hidden,
    stride_mask,
    HAS_MASK: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    """Sum the kept tokens in `first`..`last`, [BLOCK_HIDDEN], and count them."""
    rows = tl.arange(0, BLOCK_TOKENS)
    inside = columns < HIDDEN
    total = tl.zeros([BLOCK_HIDDEN], tl.float32)
    count = tl.zeros([], tl.int32)
    for chunk in range(first, last, CHUNK):
        hidden_chunk = hidden_row + chunk * stride_token + columns[None, :] * stride_hidden
        mask_chunk = mask_row + chunk * stride_mask
        size = tl.minimum(last - chunk, CHUNK).to(tl.int32)
        # Counting reads the chunk's whole mask, so that the loop below finds it in the L1 cache.
        count += tl.sum(_keep(mask_chunk, tl.arange(0, CHUNK), size, stride_mask, HAS_MASK).to(tl.int32), axis=0)
        # One sum per position in the tile: threads synchronise once per chunk, not once per tile.
        sums = tl.zeros([BLOCK_TOKENS, BLOCK_HIDDEN], tl.float32)
        # Load one tile while adding the previous one; otherwise the assembler saves registers by
        # waiting for each load.
        tile = _tile(hidden_chunk, mask_chunk, rows, size, inside, stride_token, stride_mask, HAS_MASK)
        for token in range(BLOCK_TOKENS, size + BLOCK_TOKENS, BLOCK_TOKENS):
            ahead = _tile(hidden_chunk, mask_chunk, token + rows, size, inside, stride_token, stride_mask, HAS_MASK)
            sums += tile.to(tl.float32)
            tile = ahead
        total += tl.sum(sums, axis=0)
    return total, count


@triton.jit
def _mean(total, count):
    # Counts are integers, so clamping at 1 has the effect of sentence-transformers' 1e-9: it only
    # changes an empty row, whose total is 0.
    return tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))


@triton.jit
def _divisor(squares):
    """Norm to divide a row by for unit length. No `maximum`, so that NaN stays NaN."""
    norm = tl.sqrt_rn(squares)
    return tl.where(norm < 1e-12, 1e-12, norm)


@triton.jit
def _write(
    total,
    count,
    columns,
    row,
    out_ptr,
    counts_ptr,
    HIDDEN: tl.constexpr,
    FINISH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Write the finished row, or this chunk's sum and count for mean_pool_combine_kernel."""
    inside = columns < HIDDEN
    if FINISH:
        mean = _mean(total, count)
        if NORMALIZE:
            mean = tl.div_rn(mean, _divisor(tl.sum(mean * mean, axis=0)))
        tl.store(out_ptr + row * HIDDEN + columns, mean.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = row * tl.num_programs(2) + tl.program_id(2)
        tl.store(out_ptr + slot * HIDDEN + columns, total, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(counts_ptr + slot, count)


@triton.jit
def _share(start, end, CHUNK: tl.constexpr):
    """Token range of this program: one chunk, or all that remain for the row's last program."""
    first = start + tl.program_id(2).to(tl.int64) * CHUNK
    last = tl.where(tl.program_id(2) == tl.num_programs(2) - 1, end, tl.minimum(first + CHUNK, end))
    return first, last


# Numbers that change from batch to batch must not be specialized on: each kind would be compiled
# separately.
@triton.jit(do_not_specialize=["length", "stride_batch", "stride_token", "stride_mask_batch", "stride_mask_token"])
def mean_pool_kernel(
    hidden_ptr,
    mask_ptr,
    out_ptr,
    counts_ptr,
    length,
    stride_batch,
    stride_token,
    stride_hidden,
    stride_mask_batch,
    stride_mask_token,
    HIDDEN: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    FINISH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Pool hidden [batch, length, hidden] where mask [batch, length] is not 0.

    Program (row, block, chunk) owns BLOCK_HIDDEN columns of one row and its share of the tokens.
    `stride_batch` and `stride_token` count vectors of VECTOR elements, which tells the compiler
    that a vector never straddles them.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    first, last = _share(tl.zeros([], tl.int64), length.to(tl.int64), CHUNK)
    total, count = _sum_tokens(
        hidden_ptr + row * stride_batch * VECTOR,
        mask_ptr + row * stride_mask_batch,
        first,
        last,
        columns,
        stride_token.to(tl.int64) * VECTOR,
        stride_hidden,
        stride_mask_token,
        True,
        HIDDEN,
        CHUNK,
        BLOCK_TOKENS,
        BLOCK_HIDDEN,
    )
    _write(total, count, columns, row, out_ptr, counts_ptr, HIDDEN, FINISH, NORMALIZE)


@triton.jit(do_not_specialize=["starts_ptr", "ends_ptr", "tokens", "stride_token", "stride_starts", "stride_ends"])
def mean_pool_spans_kernel(
    hidden_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    counts_ptr,
    tokens,
    stride_token,
    stride_hidden,
    stride_starts,
    stride_ends,
    HIDDEN: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    FINISH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Pool rows starts[i]..ends[i] of hidden [tokens, hidden], cut to the tokens that exist.

    Program (span, block, chunk) owns BLOCK_HIDDEN columns of one span and its share of the tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    start = tl.maximum(tl.load(starts_ptr + row * stride_starts).to(tl.int64), 0)
    end = tl.minimum(tl.load(ends_ptr + row * stride_ends).to(tl.int64), tokens)
    first, last = _share(start, end, CHUNK)
    total, count = _sum_tokens(
        hidden_ptr,
        hidden_ptr,
        first,
        last,
        columns,
        stride_token.to(tl.int64) * VECTOR,
        stride_hidden,
        0,
        False,
        HIDDEN,
        CHUNK,
        BLOCK_TOKENS,
        BLOCK_HIDDEN,
    )
    _write(total, count, columns, row, out_ptr, counts_ptr, HIDDEN, FINISH, NORMALIZE)


@triton.jit
def _combine(sums_row, columns, chunks, count, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Average one row from the sums of its chunks, in order. [BLOCK_HIDDEN]."""
    total = tl.zeros([BLOCK_HIDDEN], tl.float32)
    # Four loads in flight; the additions keep their order.
    for chunk in tl.range(0, chunks, loop_unroll_factor=4):
        total += tl.load(sums_row + chunk * HIDDEN + columns, mask=columns < HIDDEN, other=0)
    return _mean(total, count)


@triton.jit(do_not_specialize=["chunks"])
def mean_pool_combine_kernel(
    sums_ptr,
    counts_ptr,
    out_ptr,
    chunks,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Finish rows from sums [rows, chunks, hidden] and counts [rows, chunks], one row per program.

    For unit length the sums are read twice, since a wide row does not fit into registers; the
    second read hits the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    sums_row = sums_ptr + row * chunks * HIDDEN
    columns = tl.arange(0, BLOCK_HIDDEN).to(tl.int64)
    chunks = chunks.to(tl.int64)
    count = tl.zeros([], tl.int32)
    for chunk in range(chunks):
        count += tl.load(counts_ptr + row * chunks + chunk)
    divisor = 1.0
    if NORMALIZE:
        squares = tl.zeros([BLOCK_HIDDEN], tl.float32)
        for block in range(0, HIDDEN, BLOCK_HIDDEN):
            mean = _combine(sums_row, block + columns, chunks, count, HIDDEN, BLOCK_HIDDEN)
            squares += mean * mean
        divisor = _divisor(tl.sum(squares, axis=0))
    for block in range(0, HIDDEN, BLOCK_HIDDEN):
        mean = tl.div_rn(_combine(sums_row, block + columns, chunks, count, HIDDEN, BLOCK_HIDDEN), divisor)
        out = out_ptr + row * HIDDEN + block + columns
        tl.store(out, mean.to(out_ptr.dtype.element_ty), mask=block + columns < HIDDEN)
