"""The REST API of the Tinker service, served over a model of this machine: recipes written for it run without a GPU."""
