"""What `gpu_check` runs on a machine: identities, timings, and the page that it writes about them."""
