package kvtier

// Version of the library, the command and the Python package.
const Version = "0.1.0"
