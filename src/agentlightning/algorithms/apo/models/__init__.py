"""The models that write: endpoints, critic, editor."""
