"""TransformerEngine as it is found where its torch part was built against another torch."""
