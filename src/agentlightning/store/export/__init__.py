"""A store as a file, and back: `export_store` and `import_store`, over the contract alone, so that both work with an
embedded store and with a remote one. JSONL and Parquet hold the same things; base.py says which."""

from __future__ import annotations

from agentlightning.store.export.copy import export_store, import_store
from agentlightning.store.export.schema import Exported, Imported

__all__ = ["Exported", "Imported", "export_store", "import_store"]
