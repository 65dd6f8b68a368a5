"""The adapters of a policy: which agents they answer, how a directory of them opens, and how servers get them."""
