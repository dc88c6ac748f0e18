package azure

// Client is the object.Client behind a backend.
type Client = client

// Open makes one.
func Open(url, caFile string) (*Client, error) {
	return newClient(&Options{URL: url, CAFile: caFile})
}
