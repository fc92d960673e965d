"""Reading corpora: sources, rows, columns, and the parts they are cut into."""
