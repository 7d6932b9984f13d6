"""Jobs, reports, events and artifacts in an SQL database."""
