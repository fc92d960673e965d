"""The `config.pbtxt` of each model in a Triton Inference Server repository."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Tensor = tuple[str, str, int]  # name, type and size without the batch; a size of -1 varies
TEXT: Tensor = ("text", "TYPE_STRING", 1)  # what a client sends
TRUNCATED: Tensor = ("truncated", "TYPE_BOOL", 1)  # whether the text was longer than the model's limit

# None of these has been measured on a server; they are starting points.
_GPU_QUEUE_DELAY_US = 1000  # a CPU need not wait: requests gather anyway while its instances are busy
_TIMEOUT_US = 10_000_000
_MAX_QUEUE_REQUESTS = 1024
_GPU_TOKENIZERS = 4  # processes: a GPU is faster than one can tokenize
# A longer bucket is not warmed up: a model without a limit would need gigabytes for it.
_MAX_WARM_UP_TOKENS = 8192


@dataclass(frozen=True)
class Served:
    """A model, and how to serve it."""

    name: str
    dim: int
    edges: tuple[int, ...]  # the lengths that texts are padded to
    max_batch: int  # texts that run together
    batch_tokens: int  # tokens that best run together, padding included
    prompt_length: bool  # whether the model takes the number of its prompt's tokens
    gpu: bool
    instances: int
    fused: bool = False  # by the export, for onnxruntime

    @property
    def tokens(self) -> list[Tensor]:
        """The tensors that the tokenizer passes to the model."""
        extra = [("prompt_length", "TYPE_INT64", 1)] if self.prompt_length else []
        return [("input_ids", "TYPE_INT64", -1), ("attention_mask", "TYPE_INT64", -1), *extra]

    @property
    def vector(self) -> Tensor:
        """The tensor that the model gives."""
        return "sentence_embedding", "TYPE_FP32", self.dim


def tokenizer_config(served: Served) -> str:
    """Texts to padded token ids, in Python."""
    count = _GPU_TOKENIZERS if served.gpu else 1
    return f"""\
name: "{served.name}_tokenizer"
backend: "python"
max_batch_size: {served.max_batch}
{_tensors("input", [TEXT])}
{_tensors("output", [*served.tokens, TRUNCATED])}
# What happens to a text that is longer than the model's limit: "report" cuts it and says so in the output
# `truncated`, "error" refuses the request.
parameters {{ key: "on_truncate" value {{ string_value: "report" }} }}
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
{_batching(0)}"""


def model_config(served: Served) -> str:
    """Token ids to vectors, with onnxruntime."""
    return f"""\
name: "{served.name}_model"
platform: "onnxruntime_onnx"
max_batch_size: {served.max_batch}
{_tensors("input", served.tokens)}
{_tensors("output", [served.vector])}
{_runtime(served)}
{_batching(_GPU_QUEUE_DELAY_US if served.gpu else 0)}
{_warm_up(served)}"""


def ensemble_config(served: Served) -> str:
    """Text to vector: the tokenizer, then the model."""
    tokens = [name for name, _, _ in served.tokens]
    return f"""\
name: "{served.name}"
platform: "ensemble"
max_batch_size: {served.max_batch}
{_tensors("input", [TEXT])}
{_tensors("output", [served.vector, TRUNCATED])}
ensemble_scheduling {{
  step [
    {{
      model_name: "{served.name}_tokenizer"
      model_version: -1
      {_map("input_map", ["text"])}
      {_map("output_map", [*tokens, "truncated"])}
    }},
    {{
      model_name: "{served.name}_model"
      model_version: -1
      {_map("input_map", tokens)}
      {_map("output_map", ["sentence_embedding"])}
    }}
  ]
}}
"""


def _tensors(kind: str, tensors: Iterable[Tensor]) -> str:
    lines = [f'  {{ name: "{name}" data_type: {type} dims: [ {size} ] }}' for name, type, size in tensors]
    return f"{kind} [\n" + ",\n".join(lines) + "\n]"


def _map(kind: str, names: Iterable[str]) -> str:
    """A step's tensors have the same names in the ensemble."""
    return "\n      ".join(f'{kind} {{ key: "{name}" value: "{name}" }}' for name in names)


def _batching(delay_us: int) -> str:
    """Batching of requests of one shape, preferably `max_batch_size` of them."""
    return f"""\
dynamic_batching {{
  max_queue_delay_microseconds: {delay_us}
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: {_TIMEOUT_US}
    allow_timeout_override: true
    max_queue_size: {_MAX_QUEUE_REQUESTS}
  }}
}}"""


def _runtime(served: Served) -> str:
    """The number of the model's instances, and how onnxruntime runs them."""
    basic = "# Basic optimizations: the graph is fused already.\noptimization { graph { level: -1 } }"
    lines = [basic] if served.fused else []
    if served.gpu:
        return "\n".join([f"instance_group [ {{ kind: KIND_GPU count: {served.instances} }} ]", *lines])
    cpu = f"""\
# One instance for each core of the machine that serves, and one thread each: many texts at once are fastest so.
instance_group [ {{ kind: KIND_CPU count: {served.instances} }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
parameters {{ key: "inter_op_thread_count" value {{ string_value: "1" }} }}
# The weights are held once, where the server's version knows this; others ignore it.
parameters {{ key: "share_session_between_instances" value {{ string_value: "true" }} }}"""
    return "\n".join([cpu, *lines])


def _warm_up(served: Served) -> str:
    """A batch of each length before the first request: memory and kernels depend on the shape."""
    samples = [_sample(served, edge) for edge in served.edges if edge <= _MAX_WARM_UP_TOKENS]
    return "model_warmup [\n" + ",\n".join(samples) + "\n]\n"


def _sample(served: Served, edge: int) -> str:
    batch = max(1, min(served.max_batch, served.batch_tokens // edge))
    zeros = [
        f'    inputs {{ key: "{name}" value {{ data_type: {type} dims: [ {edge if size < 0 else size} ] zero_data: true'
        for name, type, size in served.tokens
    ]
    inputs = "\n".join(f"{line} }} }}" for line in zeros)
    return f'  {{\n    name: "{edge} tokens"\n    batch_size: {batch}\n{inputs}\n  }}'
