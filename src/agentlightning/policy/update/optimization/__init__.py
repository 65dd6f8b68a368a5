"""How weights move: AdamW and Muon with their schedule, and a moving average of the weights."""
