"""Commands that event loops submit to the threads of a store."""
