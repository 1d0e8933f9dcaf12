"""A fleet: replicas of a model behind one address, and the router that chooses one for each request."""
