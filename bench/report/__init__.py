"""Results, and how they are judged, compared and shown."""
