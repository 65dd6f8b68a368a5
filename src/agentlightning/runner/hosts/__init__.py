"""Agent hosts: the processes that run agents, the fork server that makes them and the messages between them."""
