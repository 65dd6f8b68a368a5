"""`agl init`: a working folder for one's own agent."""
