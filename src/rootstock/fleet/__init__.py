"""The router of several replicas: which of them has a prompt's beginning, and which is to compute the rest."""
