"""A policy that a service trains and samples: any server of the Tinker API, through the `tinker` package."""
