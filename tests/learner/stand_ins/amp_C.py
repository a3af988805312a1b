"""Its presence says that Apex was built with its extensions."""
