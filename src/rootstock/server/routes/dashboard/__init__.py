"""The dashboard at `/`: a page for browsers, its session, its live feed and its picture of the prefix tree."""
