"""The output folder of a job on Ray: Parquet files, and what a resumed run needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pd
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray

from sbert_infer.embed.ray.source import ERROR
from sbert_infer.embed.read.columns import common_schema, conform
from sbert_infer.embed.read.rows import ROW
from sbert_infer.embed.read.sources import resolve
from sbert_infer.embed.write.journal import describe_changes
from sbert_infer.embed.write.origin import FOLDER_ORIGIN, Origin
from sbert_infer.errors import EmbedError

_HIDDEN = "_sbert_infer"  # readers of Parquet folders skip names that begin with an underscore


class OutputFolder:
    """The folder. Its hidden folder holds the job's fingerprint and Ray's checkpoints."""

    def __init__(self, output: str) -> None:
        self.name = output
        self.filesystem, self.path = resolve(output)
        self._rows: dict[str, int] = {}  # of each file that is whole

    def begin(self, fingerprint: Mapping[str, Any], *, restart: bool, force: bool) -> None:
        """Check that the folder may be replaced, or belongs to the same job and can be resumed."""
        note = f"{self.path}/{_HIDDEN}/job.json"
        there = self.filesystem.get_file_info(self.path).type != pafs.FileType.NotFound
        begun = self.filesystem.get_file_info(note).type != pafs.FileType.NotFound
        if there and (restart if begun else force):
            self._empty()
            begun = False
        elif begun:
            before = json.loads(self.filesystem.open_input_stream(note).read())
            if changes := describe_changes(before, fingerprint):
                raise EmbedError(f"{self.name} belongs to another job: {changes}; undo the change, or use --restart")
        elif there and self.filesystem.get_file_info(pafs.FileSelector(self.path)):
            raise EmbedError(f"{self.name} exists: choose another name, or replace it with --force")
        if not begun:
            self.filesystem.create_dir(f"{self.path}/{_HIDDEN}", recursive=True)
            with self.filesystem.open_output_stream(note) as file:
                file.write(json.dumps(fingerprint, indent=1).encode())

    def _empty(self) -> None:
        """Remove what a job writes. A folder that also holds other files stays as it is."""
        entries = self.filesystem.get_file_info(pafs.FileSelector(self.path))
        own = (_HIDDEN, FOLDER_ORIGIN)
        if others := [entry for entry in entries if entry.base_name not in own and entry.extension != "parquet"]:
            raise EmbedError(
                f"{self.name} also holds {others[0].base_name}: choose another folder, or empty it yourself"
            )
        self.filesystem.delete_dir_contents(self.path)

    def checkpoint_config(self) -> Any:
        """Have Ray keep its checkpoints here, by row number."""
        try:
            from ray.data.checkpoint import CheckpointConfig
        except ImportError as error:
            raise EmbedError(f"ray {ray.__version__} has no checkpoints: pip install 'sbert-infer[ray]'") from error
        path = f"{self.path}/{_HIDDEN}/checkpoint"
        return CheckpointConfig(ROW, path, override_filesystem=self.filesystem, delete_checkpoint_on_success=False)

    def count_rows(self) -> int:
        """Return how many rows are written so far, without files that still lack their end."""
        files: list[Any] = []
        with suppress(OSError):
            files = self.filesystem.get_file_info(pafs.FileSelector(self.path))
        for file in files:
            if file.extension == "parquet" and file.path not in self._rows:
                with suppress(OSError, pa.ArrowInvalid):
                    self._rows[file.path] = pq.read_metadata(file.path, filesystem=self.filesystem).num_rows
        return sum(self._rows.values())

    def unify(self) -> None:
        """Give all files the same columns and types.

        Blocks are read independently: a JSON field may be integers in one and text in another.
        """
        files = pd.dataset(self.path, filesystem=self.filesystem, format="parquet").files
        schemas = {path: pq.read_schema(path, filesystem=self.filesystem).remove_metadata() for path in files}
        common = common_schema(schemas.values())
        for path in [path for path, schema in schemas.items() if not schema.equals(common)]:
            table = conform(pq.read_table(path, filesystem=self.filesystem, partitioning=None), common)
            fresh = f"{self.path}/{_HIDDEN}/unified.parquet"
            pq.write_table(table, fresh, filesystem=self.filesystem, compression="zstd")
            self.filesystem.move(fresh, path)

    def finish(self, origin: Origin) -> str:
        """Unify the files, say what they are, remove the hidden folder, and return a summary."""
        self.unify()
        with self.filesystem.open_output_stream(f"{self.path}/{FOLDER_ORIGIN}") as file:
            file.write(origin.to_json().encode())
        files = pd.dataset(self.path, filesystem=self.filesystem, format="parquet")
        rows, bad = files.count_rows(), files.count_rows(filter=pd.field(ERROR).is_valid()) if files.files else 0
        self.filesystem.delete_dir(f"{self.path}/{_HIDDEN}")
        lines = [f"{self.name}  {rows - bad:,} vectors in {len(files.files):,} files"]
        if bad:
            lines.append(f"  no vector  {bad:,} rows without a readable text: see column {ERROR!r}")
        return "\n".join(lines)
