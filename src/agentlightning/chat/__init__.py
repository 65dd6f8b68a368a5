"""How a model writes conversations: chat templates, tool-call formats and answer grammars; imports no torch."""
