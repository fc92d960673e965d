"""The similarity functions of sentence-transformers, for numpy arrays and tensors.

Four compare texts that have one vector each; MaxSim and its mean compare texts that have many.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer._util.tensor_array import TensorArray
from sbert_infer.errors import EngineError

Array = npt.NDArray[np.floating[Any]]

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
MULTI_SIMILARITIES = ("maxsim", "meanmaxsim")  # for texts that have a vector for each token

_MAX_PRODUCTS = 2**24  # numbers that MaxSim holds at once: 64 MB
_NEAR_PAIRS = 2**14  # pairs of vectors that are subtracted at once
_NO_TOKENS = -1e9  # score of a document without vectors, as in sentence-transformers


def similarity(name: str, a: Any, b: Any) -> Any:
    """Compare all pairs: `a` [n, dim], `b` [m, dim] -> [n, m]. A vector [dim] counts as one row."""
    return _apply(_MATRIX[name], a, b)


def pairwise_similarity(name: str, a: Any, b: Any) -> Any:
    """Compare row by row: `a` [n, dim], `b` [n, dim] -> [n]. Two vectors [dim] give one number."""
    found = _apply(_ROWS[name], a, b)
    return found.reshape(()) if np.ndim(a) == np.ndim(b) == 1 else found


def maxsim(queries: Any, documents: Any, *, mean: bool = False, chunk_elements: int | None = None) -> Any:
    """Return the score of each document for each query, [queries, documents].

    A score is the sum, or with `mean` the mean, over the query's vectors of the largest dot product
    with any of the document's vectors. Either argument is a list of [tokens, dim] arrays or
    tensors, a single one, or an array [texts, tokens, dim] in which zero vectors are padding. A
    document without vectors scores -1e9, below all others.

    `chunk_elements` is how many products may be in memory at once, 2^24 by default; those of one
    query and one document always are.
    """
    return _as_given(_maxsim(_texts(queries), _texts(documents), mean, chunk_elements), queries, documents)


def maxsim_pairwise(queries: Any, documents: Any, *, mean: bool = False, chunk_elements: int | None = None) -> Any:
    """Return the `maxsim` score of each query with the document at the same index, [n]."""
    a, b = _texts(queries), _texts(documents)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} queries can't be paired with {len(b)} documents")
    scores = [_maxsim([query], [document], mean, chunk_elements)[0, 0] for query, document in zip(a, b, strict=True)]
    return _as_given(np.array(scores, np.float32), queries, documents)


def multi_similarity(
    name: str,
    queries: Any,
    documents: Any,
    *,
    pairwise: bool = False,
    chunk_elements: int | None = None,
    length_normalize: bool | None = None,
    device: Any = None,
) -> Any:
    """Compare texts by `maxsim` or `meanmaxsim`, with the options that sentence-transformers has.

    `length_normalize` takes precedence over the name. `device` may only be None or "cpu".
    """
    if device is not None and str(device) != "cpu":
        raise ValueError(f"MaxSim is computed on the CPU, got device={device!r}: leave it out")
    mean = name == "meanmaxsim" if length_normalize is None else length_normalize
    compare = maxsim_pairwise if pairwise else maxsim
    return compare(queries, documents, mean=mean, chunk_elements=chunk_elements)


def _maxsim(queries: list[Array], documents: list[Array], mean: bool, chunk_elements: int | None) -> Array:
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements must be at least 1, got {chunk_elements}")
    most = chunk_elements or _MAX_PRODUCTS
    scores = np.zeros((len(queries), len(documents)), np.float32)
    widths = {text.shape[1] for text in (*queries, *documents) if len(text)}
    if len(widths) > 1:
        raise ValueError(f"the vectors have different lengths: {', '.join(map(str, sorted(widths)))}")
    asked, there = ([i for i, text in enumerate(texts) if len(text)] for texts in (queries, documents))
    longest = max((len(documents[i]) for i in there), default=1)
    for few in _chunks(asked, queries, max(1, most // longest)):
        vectors = np.concatenate([queries[i] for i in few])  # [tokens of these queries, dim]
        firsts = _firsts([len(queries[i]) for i in few])
        for some in _chunks(there, documents, most // len(vectors)):
            products = np.concatenate([documents[i] for i in some]) @ vectors.T
            best = np.maximum.reduceat(products, _firsts([len(documents[i]) for i in some]), axis=0)
            scores[np.ix_(few, some)] = np.add.reduceat(best, firsts, axis=1).T
    if mean:
        scores /= np.array([max(1, len(query)) for query in queries], np.float32)[:, None]
    scores[:, [i for i, document in enumerate(documents) if not len(document)]] = _NO_TOKENS
    return scores


def _firsts(lengths: list[int]) -> npt.NDArray[np.int64]:
    """Return the start offset of each item if items of these lengths are concatenated."""
    counts = np.array(lengths, np.int64)
    return np.cumsum(counts) - counts


def _chunks(which: list[int], texts: list[Array], most: int) -> Iterator[list[int]]:
    """Split the indices `which` into runs of at most `most` vectors, but at least one text."""
    ends = np.cumsum([len(texts[i]) for i in which])
    start = 0
    while start < len(which):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield which[start:stop]
        start = stop


def _texts(x: Any) -> list[Array]:
    """Return the vectors of each text, [tokens, dim]."""
    if isinstance(x, (list, tuple)):
        if any(np.ndim(text) != 2 for text in x):
            raise ValueError("MaxSim needs an array [tokens, dim] of each text")
        return [_rows(text) for text in x]
    if np.ndim(x) == 3:
        return [text[text.any(axis=1)] for text in map(_rows, x)]
    if np.ndim(x) != 2:
        raise ValueError(f"MaxSim needs an array [tokens, dim] of each text, got one with {np.ndim(x)} dimensions")
    return [_rows(x)]


def _apply(function: Callable[[Array, Array], Array], a: Any, b: Any) -> Any:
    """Call `function`; the result is a tensor if either input is one, on its device."""
    return _as_given(function(_rows(a), _rows(b)), a, b)


def _as_given(result: Array, a: Any, b: Any) -> Any:
    torch = sys.modules.get("torch")  # a caller who holds a tensor has imported it
    for x in (a, b):
        first = x[0] if isinstance(x, (list, tuple)) and len(x) else x
        if torch is not None and isinstance(first, torch.Tensor):
            return torch.from_numpy(result).to(first.device)
    return TensorArray.of(result)


def _rows(x: Any) -> Array:
    """Return a vector, a matrix or a list of vectors as [n, dim], in float32 or wider."""
    if isinstance(x, (list, tuple)):
        x = np.stack([_rows(row)[0] if np.ndim(row) == 1 else np.asarray(row) for row in x])
    if hasattr(x, "detach") and not isinstance(x, np.ndarray):
        x = x.detach().cpu()
        x = (x if x.element_size() >= 4 else x.float()).numpy()  # numpy has no bfloat16
    array = np.asarray(x)
    if array.dtype.kind != "f" or array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    return np.atleast_2d(array)


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the cosine of each row of `a` to the same row of `b`; two zero rows have 1."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    found: npt.NDArray[np.float64] = (x * y).sum(1) / np.maximum(norms, 1e-12)
    return np.where((norms == 0) & (np.abs(x - y).max(axis=1) == 0), 1.0, found)


def unit_rows(x: Array) -> Array:
    """Scale each row to length 1; a zero row stays zero."""
    unit: Array = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return unit


def _euclidean(a: Array, b: Array) -> Array:
    sums = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :]
    squares = sums - 2 * (a @ b.T)
    # For nearly equal vectors, a difference of such large squares is noise, and seldom exactly 0.
    near = np.argwhere(squares < 1e-3 * sums)
    for start in range(0, len(near), _NEAR_PAIRS):
        rows, columns = near[start : start + _NEAR_PAIRS].T
        squares[rows, columns] = ((a[rows] - b[columns]) ** 2).sum(1)
    distances: Array = np.sqrt(squares)
    return -distances


def _manhattan(a: Array, b: Array) -> Array:
    # Row by row, because all pairs at once would take n * m * dim numbers.
    return -np.stack([np.abs(row - b).sum(1) for row in a]) if len(a) else np.zeros((0, len(b)), a.dtype)


_MATRIX: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda a, b: unit_rows(a) @ unit_rows(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
_ROWS: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda a, b: (unit_rows(a) * unit_rows(b)).sum(1),
    "dot": lambda a, b: (a * b).sum(1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=1),
    "manhattan": lambda a, b: -np.abs(a - b).sum(1),
}


# Sparse vectors: scipy's CSR matrices -------------------------------------------------------------


def sparse_similarity(name: str, a: Any, b: Any, *, pairwise: bool = False) -> Any:
    """Compare all pairs, [n, dim], [m, dim] -> [n, m], or with `pairwise` row by row -> [n].

    Takes all that `as_csr` takes. The result is a tensor if either input holds tensors.
    """
    rows, others = as_csr(a), as_csr(b)
    if rows.shape[1] != others.shape[1] or (pairwise and rows.shape[0] != others.shape[0]):
        raise ValueError(f"embeddings of the shapes {list(rows.shape)} and {list(others.shape)} can't be compared")
    compare = _sparse_pairs if pairwise else _sparse_matrix
    return _as_given(compare(name, rows, others), a, b)


def _sparse_matrix(name: str, a: Any, b: Any) -> Array:
    if name == "manhattan":  # row by row, because no matrix product gives it
        return np.stack([_sparse_distances(name, a[[row] * b.shape[0]] - b) for row in range(a.shape[0])])
    if name == "cosine":
        a, b = _sparse_unit_rows(a), _sparse_unit_rows(b)
    if name != "euclidean":
        products: Array = (a @ b.T).toarray()
        return products
    a, b = a.astype(np.float64), b.astype(np.float64)  # small distances are differences of large squares
    squares = _squares(a)[:, None] + _squares(b)[None, :] - 2 * (a @ b.T).toarray()
    distances: Array = -np.sqrt(np.maximum(squares, 0)).astype(np.float32)
    return distances


def _sparse_pairs(name: str, a: Any, b: Any) -> Array:
    if name in ("manhattan", "euclidean"):
        return _sparse_distances(name, a - b)
    if name == "cosine":
        a, b = _sparse_unit_rows(a), _sparse_unit_rows(b)
    return np.asarray(a.multiply(b).sum(axis=1)).ravel()


def _sparse_distances(name: str, difference: Any) -> Array:
    if name == "euclidean":
        return -np.sqrt(_squares(difference))
    return -np.asarray(abs(difference).sum(axis=1)).ravel()


def _squares(rows: Any) -> Array:
    return np.asarray(rows.multiply(rows).sum(axis=1)).ravel()


def _sparse_unit_rows(rows: Any) -> Any:
    return scipy_sparse().diags(1 / np.maximum(np.sqrt(_squares(rows)), np.float32(1e-12))) @ rows


def as_csr(vectors: Any) -> Any:
    """Convert embeddings of a sparse encoder to a CSR matrix.

    They are a CSR matrix, a sparse or dense tensor, an array, or a list of these. A vector [dim]
    counts as one row.
    """
    if hasattr(vectors, "tocsr"):
        return vectors.tocsr()
    if isinstance(vectors, (list, tuple)) and vectors:
        return scipy_sparse().vstack([as_csr(vector) for vector in vectors]).tocsr()
    if getattr(vectors, "is_sparse", False) is True:
        tensor = (vectors if vectors.ndim > 1 else vectors.unsqueeze(0)).detach().cpu().coalesce()
        where, values = tensor.indices().numpy(), tensor.values().numpy()
        return scipy_sparse().csr_matrix((values, (where[0], where[1])), shape=tuple(tensor.shape))
    dimensions = getattr(vectors, "ndim", None)
    if dimensions not in (1, 2):
        error = TypeError if dimensions is None else ValueError
        raise error(f"embeddings of a sparse encoder are needed, got {type(vectors).__name__}")
    return scipy_sparse().csr_matrix(_rows(vectors))


def scipy_sparse() -> Any:
    """Import `scipy.sparse`, or raise an error that says how to install it."""
    try:
        return importlib.import_module("scipy.sparse")
    except ImportError as error:
        raise EngineError("sparse vectors need scipy: pip install 'sbert-infer[sparse]'") from error
