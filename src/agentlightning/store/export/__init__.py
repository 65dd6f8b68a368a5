"""Exports a store to a JSONL or Parquet file and imports it again, through the store contract alone."""

from __future__ import annotations

from agentlightning.store.export.copy import Exported, Imported, export_store, import_store

__all__ = ["Exported", "Imported", "export_store", "import_store"]
