"""What others have made: environments as tasks, agents and rewards; Ray. Found by name; nothing imports them."""
