"""`tokenmill route`: one address in front of many servers, which may die."""
