"""How long a batch takes on a GPU, computed from data sheets: a roofline.

Each operation takes as long as its arithmetic or its memory traffic, whichever is more. All caches
are left out, so large batches of a narrow model may be faster than computed.

Nothing here was measured on a GPU by this project. The shares of the peak that GPUs sustain come
from NVIDIA's own measurements of BERT base with TensorRT in FP16 (demo/BERT/README.md of its
repository, the versions with T4, and with A100, L4 and L40S): `tests/bench/gpu_model` compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbert_infer.types import Shape

# Of the memory bandwidth in data sheets, plain copies reach this share. Assumed.
_MEMORY_SHARE = 0.8
# Fused attention reaches half of what products with weights reach: its products are small, and a
# softmax stands between them. From the same measurements, 384 tokens against 128.
_ATTENTION_SHARE = 0.5
# The TensorRT engine of MiniLM has 72 launches for its 6 layers. Each takes this long however
# little it does, as replayed by a CUDA graph: from the same measurements, of a single text.
_LAUNCHES_PER_LAYER, _LAUNCH_S = 12, 3e-6
# Of the rate of PCIe in data sheets, copies from page-locked memory reach this share, after this
# delay. Assumed.
_PCIE_SHARE, _COPY_S = 0.75, 10e-6
_FP16_BYTES, _FP32_BYTES, _ID_BYTES = 2, 4, 8


@dataclass(frozen=True)
class Gpu:
    """A GPU, as its data sheet describes it."""

    name: str
    tera_flops: float  # dense FP16 in tensor cores, with FP32 sums
    gb_per_s: float  # memory
    pcie_gb_per_s: float  # each way
    sustained: float  # the share of `tera_flops` that products with weights reach
    measured: bool  # whether `sustained` fits NVIDIA's measurements, or is assumed

    @property
    def flops(self) -> float:
        """Operations per second that are sustained."""
        return self.tera_flops * 1e12 * self.sustained

    @property
    def bytes(self) -> float:
        """Bytes of its memory per second."""
        return self.gb_per_s * 1e9 * _MEMORY_SHARE


# PCIe x16, each way: generation 3, 16 GB/s; 4, 32; 5, 64. Data sheets that give rates with sparsity
# only are halved. Cards of at most 150 W can't keep their clock, and sustain less.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 65, 320, 16, 0.33, True),  # NVIDIA T4 datasheet; 70 W
        Gpu("L4", 121, 300, 32, 0.44, True),  # NVIDIA L4 datasheet; 72 W
        Gpu("A10", 125, 600, 32, 0.45, False),  # NVIDIA A10 datasheet; 150 W
        Gpu("A100 40 GB", 312, 1555, 32, 0.7, True),  # NVIDIA A100 datasheet
        Gpu("A100 80 GB", 312, 2039, 32, 0.7, False),  # NVIDIA A100 datasheet, SXM
        Gpu("L40S", 362, 864, 32, 0.6, True),  # NVIDIA L40S datasheet
        Gpu("RTX 4090", 165.2, 1008, 32, 0.7, False),  # Ada GPU architecture whitepaper, appendix A
        Gpu("RTX 5090", 209.5, 1792, 64, 0.7, False),  # RTX Blackwell GPU architecture whitepaper, appendix A
        Gpu("H100", 989, 3350, 64, 0.6, False),  # NVIDIA H100 datasheet, SXM
    )
}


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer encoder."""

    name: str
    layers: int
    hidden: int
    max_length: int
    feed_forward: int = 4  # the width of its inner layers, in widths of the model

    def flops(self, shape: Shape) -> float:
        """Operations for all rows of `shape`: products with weights, and attention."""
        return self.layers * shape.tokens * (self._product_flops() + self._attention_flops(shape))

    def run_s(self, shape: Shape, gpu: Gpu) -> float:
        """Seconds on the GPU for all rows of `shape`, from token ids to vectors."""
        layer = self._products_s(shape, gpu) + self._attention_s(shape, gpu) + self._norms_s(shape, gpu)
        ends = (self._embedding_bytes(shape) + self._pooling_bytes(shape)) / gpu.bytes
        return self.layers * (layer + _LAUNCHES_PER_LAYER * _LAUNCH_S) + ends

    def copy_in_s(self, shape: Shape, gpu: Gpu) -> float:
        """Seconds to copy ids, segments and positions of tokens, starts and ends of texts."""
        return _COPY_S + _ID_BYTES * (3 * shape.tokens + 2 * shape.rows * shape.segments) / _pcie(gpu)

    def copy_out_s(self, shape: Shape, gpu: Gpu) -> float:
        """Seconds to copy the vectors of all segments, whether or not a text is there."""
        return _COPY_S + _FP32_BYTES * shape.rows * shape.segments * self.hidden / _pcie(gpu)

    def _product_flops(self) -> float:
        return 2 * (4 + 2 * self.feed_forward) * self.hidden**2  # per layer and token: 24 hidden^2

    def _attention_flops(self, shape: Shape) -> float:
        return 4 * shape.length * self.hidden  # per layer and token: the row is attended to as a whole

    def _products_s(self, shape: Shape, gpu: Gpu) -> float:
        """Seconds of a layer's four products with weights."""
        inner = self.feed_forward * self.hidden
        products = [
            (self.hidden, 3 * self.hidden),
            (self.hidden, self.hidden),
            (self.hidden, inner),
            (inner, self.hidden),
        ]
        total = 0.0
        for wide, out in products:
            moved = _FP16_BYTES * (shape.tokens * (wide + out) + wide * out)
            total += max(2 * shape.tokens * wide * out / gpu.flops, moved / gpu.bytes)
        return total

    def _attention_s(self, shape: Shape, gpu: Gpu) -> float:
        moved = _FP16_BYTES * shape.tokens * (4 * self.hidden + shape.length)  # with the mask, once
        return max(shape.tokens * self._attention_flops(shape) / (_ATTENTION_SHARE * gpu.flops), moved / gpu.bytes)

    def _norms_s(self, shape: Shape, gpu: Gpu) -> float:
        """Seconds of two residual sums with normalisation, which read two rows and write one."""
        return 2 * _FP16_BYTES * shape.tokens * 3 * self.hidden / gpu.bytes

    def _embedding_bytes(self, shape: Shape) -> int:
        return _FP16_BYTES * shape.tokens * 4 * self.hidden  # three tables are read, their sum is written

    def _pooling_bytes(self, shape: Shape) -> int:
        return _FP16_BYTES * shape.tokens * self.hidden + _FP32_BYTES * shape.rows * shape.segments * self.hidden


MODELS = {
    model.name: model
    for model in (
        Model("MiniLM-L6", layers=6, hidden=384, max_length=512),
        Model("BERT base", layers=12, hidden=768, max_length=512),
    )
}


def _pcie(gpu: Gpu) -> float:
    return gpu.pcie_gb_per_s * 1e9 * _PCIE_SHARE
