"""The contract over a SQL database.

From the outside in: store.py and upkeep.py (the contract), embedded.py (opening one), engine.py and lane.py (the
threads), calls.py and unit.py (what a batch decides), lifecycle.py (the rules), spans.py, packs.py and tokens.py (what
spans become), database.py with sqlite/ and postgres/ (what runs the statements).
"""
