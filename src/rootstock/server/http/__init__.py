"""HTTP below the application: connections, bounds of bodies, errors as answers, the end of a server's work."""
