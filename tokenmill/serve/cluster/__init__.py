"""`tokenmill serve --cluster`: who starts replicas, on this machine or by Ray on many, and keeps their number right."""
