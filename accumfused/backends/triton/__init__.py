"""The three verbs in Triton."""
