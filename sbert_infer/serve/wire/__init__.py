"""What goes over the wire: the schemas of requests and responses, and problems."""
