"""Model -> Profile: stages, bytes without memory, times on the device."""
