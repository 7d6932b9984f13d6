"""The light client of Weighbridge: what people import and run in their own CI."""
