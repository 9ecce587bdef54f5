"""What outlives a request: the journal, the batch jobs in it, and stored responses in memory."""
