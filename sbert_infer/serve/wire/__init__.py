"""What goes over the wire: request and response schemas, and problems."""
