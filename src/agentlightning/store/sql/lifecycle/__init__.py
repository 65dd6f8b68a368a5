"""The rules of rollouts and attempts: legal changes of status, claims, deadlines."""
