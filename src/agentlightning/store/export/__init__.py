"""Exports a store to a JSONL or Parquet file and imports it again, through the store contract alone."""

from __future__ import annotations

from agentlightning.store.export.copy import export_store, import_store
from agentlightning.store.export.schema import Exported, Imported

__all__ = ["Exported", "Imported", "export_store", "import_store"]
