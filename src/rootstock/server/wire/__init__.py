"""Data between the HTTP server and the wire formats. It knows neither HTTP nor any format."""
