"""Results, tables, charts and the HTML page."""
