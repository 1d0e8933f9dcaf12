"""The HTTP server in layers; each imports only from the ones below it: app, routes, formats, answers, observe,
models, access, request_info, and at the bottom http and wire (import-linter checks it).
"""
