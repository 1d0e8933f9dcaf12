"""Rules of who may send a request, and how many: hosts, origins, API keys, logins, rate limits."""
