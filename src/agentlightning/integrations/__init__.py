"""Environments that others have made, as tasks, agents and rewards. Found by name; nothing else imports them."""
