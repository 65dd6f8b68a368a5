"""The job of `agl demo`: an agent that solves word problems with a calculator, its tasks and its recipe."""
