"""Many ranks that compute one model: how it is divided among them, and how they talk."""
