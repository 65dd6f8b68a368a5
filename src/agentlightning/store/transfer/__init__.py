"""A store as a file, and back: `export_store` and `import_store`, over the contract alone, so that both work with an
embedded store and with a remote one. JSONL and Parquet hold the same things; base.py says which."""

from __future__ import annotations

from agentlightning.store.transfer.base import Exported, Imported
from agentlightning.store.transfer.copying import export_store, import_store

__all__ = ["Exported", "Imported", "export_store", "import_store"]
