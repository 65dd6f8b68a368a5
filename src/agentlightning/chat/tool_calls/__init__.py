"""How model families write tool calls: the contract, the formats, and the table of their names."""
