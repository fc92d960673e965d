"""The folder beside the output in which a job grows part by part, and from which it is resumed.

    vectors.parquet.parts/
      job.json          what the job depends on
      000000.arrow      a part: carried columns, vectors, and in its metadata where the next begins
      000000.bad.jsonl  its rows that were set aside, if any
      000001.arrow
      finishing         all parts are done, and the output may be in place
      lock              held by the process that works here

Files appear complete or not at all, and in this order: the parts present are the journal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from sbert_infer._util.files import locked, staged
from sbert_infer.embed.read.columns import to_json
from sbert_infer.embed.read.parts import BadRow, Part, Position
from sbert_infer.embed.write.vectors import fixed_lists
from sbert_infer.errors import EmbedError

_STATE = b"sbert_infer.part"


@dataclass(frozen=True)
class PartStats:
    """Counts of a part's rows."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    bad: int = 0
    reused: int = 0  # texts whose vectors are of earlier outputs

    def __add__(self, other: PartStats) -> PartStats:
        return PartStats(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class StoredPart:
    """A part that is safe on disk."""

    path: Path
    stats: PartStats
    end: Position
    is_last: bool

    def read(self) -> pa.Table:
        """Its rows, memory-mapped."""
        with pa.memory_map(str(self.path)) as file:
            return pa.ipc.open_file(file).read_all()

    def schema(self) -> pa.Schema:
        """Its columns and their types."""
        with pa.memory_map(str(self.path)) as file:
            return pa.ipc.open_file(file).schema.remove_metadata()

    @property
    def bad_path(self) -> Path:
        """The file that lists its bad rows, if it has any."""
        return self.path.with_suffix(".bad.jsonl")


@dataclass
class Journal:
    """The parts of a job that are done."""

    folder: Path
    parts: list[StoredPart] = field(default_factory=list)

    @property
    def position(self) -> Position:
        """Where the next part begins."""
        return self.parts[-1].end if self.parts else Position()

    @property
    def is_complete(self) -> bool:
        """Whether the whole input has been read."""
        return bool(self.parts) and self.parts[-1].is_last

    @property
    def stats(self) -> PartStats:
        """The sum over all parts."""
        return sum((part.stats for part in self.parts), PartStats())

    def append(self, part: Part, column: str, vectors: npt.NDArray[Any], stats: PartStats) -> None:
        """Write the next part. It is safe on disk when this returns."""
        path = self.folder / f"{len(self.parts):06d}.arrow"
        stored = StoredPart(path, stats, part.end, part.is_last)
        if part.bad:
            with staged(stored.bad_path) as new:
                new.path.write_text("".join(map(_bad_line, part.bad)), encoding="utf-8", newline="\n")
                new.commit()
        table = part.carried().append_column(column, fixed_lists(vectors))
        state = {"stats": asdict(stats), "end": asdict(part.end), "is_last": part.is_last}
        table = table.replace_schema_metadata({_STATE: json.dumps(state)})
        with staged(path) as new:
            with pa.OSFile(str(new.path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            new.commit()
        self.parts.append(stored)

    @property
    def is_finishing(self) -> bool:
        """Whether an earlier run was about to put the output in place, and may have done so."""
        return (self.folder / "finishing").exists()

    def mark_finishing(self) -> None:
        """Note that the output may be in place from now on."""
        (self.folder / "finishing").touch()

    def remove(self) -> None:
        """Delete the folder. Renamed first, it is never resumed when half of it is gone."""
        waste = self.folder.with_name(self.folder.name + ".done")
        shutil.rmtree(waste, ignore_errors=True)
        self.folder.rename(waste)
        shutil.rmtree(waste)


@contextmanager
def open_journal(folder: Path, fingerprint: Mapping[str, Any], *, restart: bool = False) -> Iterator[Journal]:
    """Open the parts in `folder`, if they are this job's, and keep other processes out."""
    shutil.rmtree(folder.with_name(folder.name + ".done"), ignore_errors=True)
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        if restart:
            for file in sorted(folder.glob("[!l]*"), reverse=True):  # all but the lock, the first part last
                file.unlink()
        if any(folder.glob("*.arrow")):
            _check_job(folder, fingerprint)
        else:
            with staged(folder / "job.json") as new:
                new.path.write_text(json.dumps(fingerprint, indent=1), encoding="utf-8")
                new.commit()
        journal = Journal(folder, list(_stored_parts(folder)))
        try:
            yield journal
        finally:
            if not journal.parts:  # nothing to resume
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock", wait=False))
        except BlockingIOError as error:
            raise EmbedError(f"another process is at work in {folder}: wait for it, or stop it first") from error
        yield


def _check_job(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    try:
        before = dict(json.loads((folder / "job.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise EmbedError(f"{folder}/job.json is damaged: begin again with --restart") from error
    if changes := describe_changes(before, fingerprint):
        raise EmbedError(f"{folder} belongs to another job: {changes}; undo the change, or begin again with --restart")


def describe_changes(before: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> str:
    """Say what differs from the fingerprint `before`, which was read from JSON; "" if nothing."""
    now = json.loads(json.dumps(fingerprint))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(_change(name, before, now) for name in changed[:3])


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if name == "artifact":
        return f"the artifact has changed (sha256 {before.get(name, '')[:12]}, now {now.get(name, '')[:12]})"
    if name.startswith("model "):
        return f"its {name.removeprefix('model ')} {'differ' if name.endswith('s') else 'differs'}"
    if name == "inputs":
        return "the list of input files has changed"
    if name.startswith(("input ", "reuse ")):
        state = "has changed" if name in before and name in now else "is new" if name in now else "is gone"
        return f"{name} {state}"
    return f"{name} was {before.get(name)!r}, now {now.get(name)!r}"


def _stored_parts(folder: Path) -> Iterator[StoredPart]:
    for number, path in enumerate(sorted(folder.glob("*.arrow"))):
        try:
            with pa.memory_map(str(path)) as file:
                state = json.loads(pa.ipc.open_file(file).schema.metadata[_STATE])
        except (pa.ArrowInvalid, KeyError, OSError) as error:
            raise EmbedError(f"{path} is damaged: begin again with --restart") from error
        if path.stem != f"{number:06d}":
            raise EmbedError(f"{folder} lacks part {number:06d}: begin again with --restart")
        yield StoredPart(path, PartStats(**state["stats"]), Position(**state["end"]), state["is_last"])


def _bad_line(bad: BadRow) -> str:
    place = {"file": bad.file, "row": bad.row, "line": bad.line, "id": bad.problem.id, "reason": bad.problem.reason}
    if bad.problem.rows > 1:
        place["rows"] = bad.problem.rows
    return to_json({name: value for name, value in place.items() if value is not None}) + "\n"
