"""The wire: protobuf schemas and the codec between them and the policy's arrays."""
